"""What `make quickstart` trains: a task, its reward, and a small model that starts out shy."""
