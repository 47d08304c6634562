"""The pages of reports and their sections."""
