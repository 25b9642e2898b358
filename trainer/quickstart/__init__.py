"""The quickstart: a task, its reward, and a small model that seldom dares to answer at first."""
