// Scratch memory, aligned to 64 bytes. Large blocks are kept for the next call: the system would clear every page again.
#pragma once

#include <cstddef>

void* take_memory(std::size_t bytes);
void give_memory(void* block, std::size_t bytes) noexcept;
