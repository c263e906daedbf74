// The standard headers of the kernels, included before an instruction set is chosen: it is not for their functions.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "problem.h"
#include "threads.h"

enum What { FORWARD, BACKWARD, COUNT };
