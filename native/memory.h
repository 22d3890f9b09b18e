// One large anonymous mapping, in huge pages where the system gives them.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>

namespace octavo {

class HugeBuffer {
 public:
  explicit HugeBuffer(size_t bytes) : bytes_(bytes) {
    // A vector load at the end of the last row may reach past it, so one page more is mapped.
    mapped_ = (bytes + kPage + kSlack - 1) / kPage * kPage + kPage;
    base_ = static_cast<char*>(
        mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    data_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(base_) + kPage - 1) / kPage * kPage);
#ifdef MADV_HUGEPAGE
    madvise(data_, (bytes_ + kPage - 1) / kPage * kPage, MADV_HUGEPAGE);
#endif
  }
  ~HugeBuffer() { munmap(base_, mapped_); }
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kPage = size_t(2) << 20, kSlack = 4096;
  size_t bytes_, mapped_;
  char *base_, *data_;
};

}  // namespace octavo
