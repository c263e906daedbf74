// Work shared by the threads of PyTorch's OpenMP team, or by threads that live as long as the call.
#pragma once

#include <cstdint>

// Not a template: what is compiled for an instruction set must not be shared with code for another.
void parallel_for(int64_t tasks, int64_t threads, void (*task)(const void* context, int64_t i), const void* context);
