"""The drill: engines are killed during training, which must end as well as if they were not."""
