extern "C" __attribute__((visibility("default"))) int kvpager_other_entry() { return 0; }
