"""A library with NVML's functions, whose devices the tests describe."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from umbra.runtime.process.nvml import LIBRARY

SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process_t;
typedef struct { unsigned long long used, held; unsigned pid; char uuid[96], cores[96]; } state_t;
static const long FIRST = 7, FIRST_INSTANCE = 100;  /* devices, and a MIG instance of each */
/* The file has a line for each device. */
static int read_states(state_t *states, int max) {
    char line[512]; int count = 0;
    FILE *file = fopen(PATH, "r");
    while (file && count < max && fgets(line, sizeof line, file)) {
        state_t *s = states + count;
        count += sscanf(line, "%llu %llu %u %95s %95s",
                        &s->used, &s->held, &s->pid, s->uuid, s->cores) == 5;
    }
    if (file) fclose(file);
    return count;
}
static int look(void *device, state_t *state) {
    state_t states[8];
    long idx = (long)device - FIRST;
    if (idx < 0 || idx >= read_states(states, 8)) return 2;
    *state = states[idx];
    return 0;
}
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) {
    state_t states[8];
    *count = read_states(states, 8);
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned idx, void **device) {
    state_t state;
    *device = (void*)(FIRST + idx);
    return look(*device, &state);
}
int nvmlDeviceGetIndex(void *device, unsigned *idx) { *idx = (long)device - FIRST; return 0; }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned nbytes) {
    state_t state;
    if (look(device, &state) || strlen(state.uuid) >= nbytes) return 2;
    strcpy(uuid, state.uuid);
    return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    long idx;
    if (sscanf(uuid, "MIG-instance-of-%ld", &idx) != 1) return 2;
    *device = (void*)(FIRST_INSTANCE + idx);
    return 0;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *instance, void **device) {
    state_t state;
    *device = (void*)((long)instance - FIRST_INSTANCE + FIRST);
    return look(*device, &state);
}
int nvmlDeviceGetCpuAffinity(void *device, unsigned num_words, unsigned long *words) {
    state_t state;
    if (look(device, &state) || !strcmp(state.cores, "unknown")) return 2;
    memset(words, 0, num_words * sizeof *words);
    for (char *core = strtok(state.cores, ","); core; core = strtok(NULL, ",")) {
        unsigned long idx = strtoul(core, NULL, 10);
        if (idx / 64 >= num_words) return 2;
        words[idx / 64] |= 1UL << idx % 64;
    }
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    state_t state;
    if (look(device, &state)) return 2;
    memory->used = state.used;
    if (strstr(state.uuid, "shares-memory")) return 3;  /* such a GPU has none of its own */
    memory->total = 140ULL << 30;
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process_t *out) {
    state_t state;
    if (look(device, &state) || *count < 2) return 2;
    out[0].pid = 1; out[0].used = 5; *count = 1;
    if (state.held) { out[1].pid = state.pid; out[1].used = state.held; *count = 2; }
    return 0;
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeGpu:
    """
    Attributes:
        held_nbytes: by process `pid`.
        cores: those near it; None: unknown.
    """

    used_nbytes: int = 0
    held_nbytes: int = 0
    pid: int = 0
    uuid: str = "GPU-0"
    cores: tuple[int, ...] | None = None

    def line(self) -> str:
        cores = "unknown" if self.cores is None else ",".join(map(str, self.cores))
        return f"{self.used_nbytes} {self.held_nbytes} {self.pid} {self.uuid} {cores}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeNvml:
    """
    Attributes:
        library: path of the library.
        state: the file that it reads whenever it is asked.
    """

    library: str
    state: Path

    def show(self, *gpus: FakeGpu) -> None:
        new = self.state.with_suffix(".new")
        new.write_text("".join(gpu.line() for gpu in gpus))
        os.replace(new, self.state)  # nobody reads half of it


@pytest.fixture(scope="module")
def fake_nvml(tmp_path_factory: pytest.TempPathFactory) -> FakeNvml:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    source, library, state = folder / "fake.c", folder / "fake.so", folder / "state"
    source.write_text(SOURCE)
    flags = ["-shared", "-fPIC", f'-DPATH="{state}"']
    subprocess.run([compiler, *flags, "-o", library, source], check=True, timeout=60)
    return FakeNvml(library=str(library), state=state)


@pytest.fixture
def nvml_library_path(fake_nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that begin now find the library by its name."""
    shutil.copy(fake_nvml.library, tmp_path / LIBRARY)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
