"""An OpenAI Chat Completions endpoint in front of the engines. It records the turns that agents sample."""
