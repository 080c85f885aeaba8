"""An OpenAI Chat Completions endpoint in front of the engines that records the turns that agents sample."""
