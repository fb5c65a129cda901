"""How the shipped reward model is made; `pipelines/reward_model` holds what ships."""
