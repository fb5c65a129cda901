"""What one agent program is given: its context, and behind it steps, actions and sandboxes."""
