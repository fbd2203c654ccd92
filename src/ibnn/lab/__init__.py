"""Jobs, run folders, evaluation, reports and the demo."""
