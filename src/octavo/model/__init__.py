"""From a MODEL name to something that runs. Importing this package imports neither torch nor transformers."""
