"""Fixtures of engine tests, of every tier."""

from engine_fixtures import frees_memory_asleep, model_folder, model_kind, one_thread, resumes_draws

__all__ = ["frees_memory_asleep", "model_folder", "model_kind", "one_thread", "resumes_draws"]
