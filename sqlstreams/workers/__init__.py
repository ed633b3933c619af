"""Background workers: one file each, all with the same skeleton (config, `run_once`, `actor`)."""
