"""LAB: jobs, experiments, and what is shown of them."""
