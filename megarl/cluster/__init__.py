"""The processes of a run: placement, Ray actors with typed methods, supervision. The only room that imports ray."""
