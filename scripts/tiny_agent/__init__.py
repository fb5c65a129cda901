"""How the shipped agent is made and evaluated; `pipelines/tiny_agent` holds what ships."""
