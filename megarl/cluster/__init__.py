"""The processes of a run: placement, Ray actors with typed methods, supervision. The only room that imports ray."""

import os

# No port of Ray answers whoever lacks the token of the run. Ray reads this when it is imported.
os.environ["RAY_AUTH_MODE"] = "token"
