// Tests of what ends the process.
#pragma once

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>

namespace kvpager::testing {

// How the function ends a process of its own: the words it died with, or "lived".
inline std::string last_words(const std::function<void()>& function) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    signal(SIGABRT, SIG_DFL);  // doctest's handler would report a failed test
    function();
    _exit(0);
  }
  close(ends[1]);
  std::string words;
  char buffer[512];
  for (ssize_t got; (got = read(ends[0], buffer, sizeof buffer)) > 0;) {
    words.append(buffer, static_cast<size_t>(got));
  }
  close(ends[0]);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return "lived";
  return words;
}

}  // namespace kvpager::testing
