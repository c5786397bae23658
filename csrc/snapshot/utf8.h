// UTF-8 as RFC 3629 has it: no overlong forms, no surrogates, nothing beyond U+10FFFF.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kvpager::snapshot {

inline bool is_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto first = static_cast<uint8_t>(text[i]);
    size_t more = 0;
    uint32_t code = first;
    uint32_t least = 0;
    if (first < 0x80) {
      ++i;
      continue;
    }
    if ((first & 0xE0) == 0xC0) {
      more = 1, code = first & 0x1F, least = 0x80;
    } else if ((first & 0xF0) == 0xE0) {
      more = 2, code = first & 0x0F, least = 0x800;
    } else if ((first & 0xF8) == 0xF0) {
      more = 3, code = first & 0x07, least = 0x10000;
    } else {
      return false;
    }
    if (text.size() - i <= more) return false;
    for (size_t k = 1; k <= more; ++k) {
      const auto next = static_cast<uint8_t>(text[i + k]);
      if ((next & 0xC0) != 0x80) return false;
      code = code << 6 | (next & 0x3F);
    }
    if (code < least || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) return false;
    i += more + 1;
  }
  return true;
}

}  // namespace kvpager::snapshot
