// The kernels behind two pipes. A request holds the function's number, its struct, and the memory that the struct points
// to; the answer is the function's status, and that memory again.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../../src/mgk/csrc/params.h"

extern "C" {
int mgk_forward(const AttentionParams*, const char*);
int mgk_backward(const AttentionParams*, const char*);
int mgk_count(const AttentionParams*, const char*);
int mgk_decode(const DecodeParams*, const char*);
int mgk_mixture_forward(const MixtureParams*, const char*);
int mgk_mixture_backward(const MixtureParams*, const char*);
int mgk_dropout(const DropoutParams*, const char*);
}

template <typename Params>
static int64_t run(int (*function)(const Params*, const char*), const std::vector<char>& call) {
    return function(reinterpret_cast<const Params*>(call.data()), "portable");
}

struct Block {
    int64_t field;   // offset of the pointer in the struct
    int64_t offset;  // of the address in its memory
    std::vector<char> memory;
};

static void read_all(void* to, size_t size) {
    if (fread(to, 1, size, stdin) != size) std::exit(0);  // end of input
}

static int64_t read_number() {
    int64_t number;
    read_all(&number, sizeof number);
    return number;
}

int main() {
    for (;;) {
        const int64_t function = read_number();
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
        int64_t status = 0;
        switch (function) {  // in the order of FUNCTIONS in emulated.py
            case 0: status = run(mgk_forward, call); break;
            case 1: status = run(mgk_backward, call); break;
            case 2: status = run(mgk_count, call); break;
            case 3: status = run(mgk_decode, call); break;
            case 4: status = run(mgk_mixture_forward, call); break;
            case 5: status = run(mgk_mixture_backward, call); break;
            default: status = run(mgk_dropout, call);
        }
        fwrite(&status, sizeof status, 1, stdout);
        for (const Block& block : blocks) fwrite(block.memory.data(), 1, block.memory.size(), stdout);
        fflush(stdout);
    }
}
