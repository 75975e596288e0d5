// Calls other functions of this library one after another. See engine/kernels/native_replay.py.

#include <cstdint>

namespace {

struct Step {
    void (*function)(const void* call);
    const void* call;
};

}  // namespace

extern "C" void replay(const Step* steps, int64_t count) {
    for (int64_t i = 0; i < count; ++i) steps[i].function(steps[i].call);
}
