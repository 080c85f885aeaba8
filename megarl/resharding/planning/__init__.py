"""Plans of copies from source to destination ranks, as pure data: made, checked, balanced, scheduled."""
