"""Where the time of a stored run went, and the page that shows it."""
