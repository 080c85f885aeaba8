"""The rollout engine for image models, built on diffusers' transformer classes."""
