// Tests of what ends the process.
#pragma once

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>

namespace kvpager::testing {

// How a process ends, and what it printed as errors.
struct Ending {
  std::string words;
  bool died;  // by a signal, or with another code than 0
};

// Runs the function in a process of its own.
inline Ending ending_of(const std::function<void()>& function) {
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
  return {words, !(WIFEXITED(status) && WEXITSTATUS(status) == 0)};
}

// The words that a process died with, or "lived".
inline std::string last_words(const std::function<void()>& function) {
  const Ending ending = ending_of(function);
  return ending.died ? ending.words : "lived";
}

}  // namespace kvpager::testing
