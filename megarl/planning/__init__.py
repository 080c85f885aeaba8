"""Pure arithmetic on models and layouts."""
