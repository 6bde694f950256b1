"""What graphrt costs and saves; README.md says what each script measures."""
