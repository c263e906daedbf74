// Standard headers, included before an instruction set is chosen, so that their functions are not compiled for it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "memory.h"
#include "params.h"
#include "threads.h"
