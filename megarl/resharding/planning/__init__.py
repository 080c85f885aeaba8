"""Plan copies from source to destination ranks as pure data: build, balance, check and schedule."""
