"""The panels of the page, one view each."""
