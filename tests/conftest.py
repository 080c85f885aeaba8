"""Of all tests: an example of hypothesis may take as long as it does on a busy machine."""

from hypothesis import settings

settings.register_profile("megarl", deadline=None)
settings.load_profile("megarl")
