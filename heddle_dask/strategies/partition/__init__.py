"""Assignment of a whole batch of trajectories to engines: pure functions of plain numbers."""
