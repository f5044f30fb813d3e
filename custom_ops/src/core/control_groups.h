// Limits that Linux sets on groups of processes.
#pragma once
#include <algorithm>
#include <cstdio>
#include <string>

namespace quantmoe {

// Calls visit(folder, v2) for the control groups of this process that have a controller ("cpu", "memory"). These are
// its own group, then the groups around it, up to the mount point. In a container the group's own folder may be
// missing. Then the mount point is the container's group.
//
// root: "", or for tests the folder with proc and sys.
template <class Visit>
void for_control_groups(const std::string& root, const std::string& controller, const Visit& visit) {
  std::FILE* const file = std::fopen((root + "/proc/self/cgroup").c_str(), "r");
  if (!file) return;
  char line[4200];  // hierarchy:controllers:path
  while (std::fgets(line, sizeof line, file)) {
    const std::string text(line, std::find_if(line, line + sizeof line, [](char c) { return c == '\n' || !c; }));
    const size_t controllers = text.find(':') + 1, path = text.find(':', controllers) + 1;
    if (!controllers || !path) continue;
    const std::string names = std::string(",").append(text, controllers, path - 1 - controllers).append(",");
    const bool v2 = names == ",,";
    if (!v2 && names.find("," + controller + ",") == std::string::npos) continue;
    const std::string mount = root + "/sys/fs/cgroup" + (v2 ? "" : "/" + controller);
    for (std::string group = text.substr(path);; group.erase(group.rfind('/'))) {
      if (group == "/") group.clear();
      visit(mount + group, v2);
      if (group.find('/') == std::string::npos) break;
    }
  }
  std::fclose(file);
}

}  // namespace quantmoe
