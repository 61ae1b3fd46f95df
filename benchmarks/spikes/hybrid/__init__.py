"""A spike: exact mode on a hybrid of linear and full attention. README.md has the findings."""
