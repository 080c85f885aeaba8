"""Built-in and user-defined reward functions, and the scorer that combines their results. No torch."""
