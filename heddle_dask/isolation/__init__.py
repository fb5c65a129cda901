"""What an action may use of its machine: cores, memory, processes; and how processes are held to it."""
