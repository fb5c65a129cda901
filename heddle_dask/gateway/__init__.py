"""A gateway for agents that speak the APIs of OpenAI and Anthropic: each request is a step of their trajectory."""
