"""The vLLM engine and the code that runs inside its workers."""
