// The same source; CMakeLists.txt gives this file flags that let a compiler reorder and contract.
#include "canary.cc"
