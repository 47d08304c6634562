"""The settings of a run by topic. Each field is a flag, and is written here alone (`field.flag`)."""
