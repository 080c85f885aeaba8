"""The rollout engine for image models, around diffusers' own transformer classes."""
