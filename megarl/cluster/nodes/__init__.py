"""The other machines of a run: how they join it, and what the driver hears of them."""
