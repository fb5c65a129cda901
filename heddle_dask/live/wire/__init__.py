"""What crosses processes: typed messages, results, and the undocumented parts of `distributed`."""
