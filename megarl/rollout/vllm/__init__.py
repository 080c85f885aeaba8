"""The engine on vLLM, and what runs inside its workers."""
