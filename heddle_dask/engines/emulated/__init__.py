"""The emulated engine: an engine's HTTP surface and an engine's times, without a model behind them."""
