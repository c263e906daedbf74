// The kernels' doors behind two pipes: each request holds a door's number, its struct, and the memory that the struct points
// to; the answer is the code that the door returned, and that memory again.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../../src/mgk/csrc/problem.h"

extern "C" {
int mgk_forward(const Problem*, int);
int mgk_backward(const Problem*, int);
int mgk_count(const Problem*, int);
int mgk_decode(const Decode*, int);
}

struct Block {
    int64_t field;   // where in the struct the pointer stands
    int64_t offset;  // of what it points to, in its memory
    std::vector<char> memory;
};

static void read_all(void* to, size_t size) {
    if (fread(to, 1, size, stdin) != size) std::exit(0);  // the other side has gone
}

static int64_t read_number() {
    int64_t number;
    read_all(&number, sizeof number);
    return number;
}

int main() {
    for (;;) {
        const int64_t door = read_number();
        std::vector<char> call(read_number());
        read_all(call.data(), call.size());
        std::vector<Block> blocks(read_number());
        for (Block& block : blocks) {
            block.field = read_number();
            block.offset = read_number();
            block.memory.resize(read_number());
            read_all(block.memory.data(), block.memory.size());
            char* start = block.memory.data() + block.offset;
            std::memcpy(call.data() + block.field, &start, sizeof start);
        }
        const auto* problem = reinterpret_cast<const Problem*>(call.data());
        const auto* decode = reinterpret_cast<const Decode*>(call.data());
        const int64_t code = door == 0   ? mgk_forward(problem, 0)
                             : door == 1 ? mgk_backward(problem, 0)
                             : door == 2 ? mgk_count(problem, 0)
                                         : mgk_decode(decode, 0);
        fwrite(&code, sizeof code, 1, stdout);
        for (const Block& block : blocks) fwrite(block.memory.data(), 1, block.memory.size(), stdout);
        fflush(stdout);
    }
}
