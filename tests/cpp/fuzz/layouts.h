// Layouts and plans of random operands, compared with what looking at every element gives.
#pragma once
#include <cstddef>
#include <cstdint>

// One input: what libFuzzer calls. An input is a row of choices. Whatever is wrong ends the program, with a
// line that says what. Returns 0, as libFuzzer asks for.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
