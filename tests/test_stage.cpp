// What run_forward checks before a kernel starts, and the workspace.
#include "fake_stage.hpp"

#include "stage/device.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>

using namespace workbook;

namespace {

/// A valid launch of B=1 Hq=2 Hkv=1 Nq=3 Nkv=5 d=4, to be spoilt.
class RunForward : public testing::Test {
protected:
    void SetUp() override {
        try {
            device_ = Device::current();
        } catch (const Refused& reason) {
            GTEST_SKIP() << reason.what();
        }
        problem_.heads = 2;
        problem_.seq = 3;
        problem_.kv_seq = 5;
        problem_.head_dim = 4;
    }

    Forward args() {
        return {problem_,
                {q_.data(), problem_.q_strides()},
                {k_.data(), problem_.kv_strides()},
                {v_.data(), problem_.kv_strides()},
                {o_.data(), problem_.q_strides()},
                static_cast<float*>(lse_.data()),
                device_,
                {},
                workspace_};
    }

    template <class Error = InvalidArgument>
    void expect_error(const std::function<void(Forward&)>& spoil, const std::string& message) {
        Forward forward = args();
        spoil(forward);
        try {
            run_forward(fake_stage().variants[0], forward);
            ADD_FAILURE() << "accepted; expected: " << message;
        } catch (const Error& error) {
            EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
        }
    }

    static std::byte* at(const DeviceBuffer& buffer, std::size_t bytes) { return static_cast<std::byte*>(buffer.data()) + bytes; }

    Problem problem_;
    Device device_;
    Workspace workspace_;
    DeviceBuffer q_{1024}, k_{1024}, v_{1024}, o_{1024}, lse_{1024};
};

TEST_F(RunForward, AcceptsWhatIsRight) {
    Forward forward = args();
    run_forward(fake_stage().variants[0], forward);
    synchronize(forward.exec.stream);
    EXPECT_EQ(forward.exec.shared_memory_limit, device_.shared_memory_per_block);
}

TEST_F(RunForward, ChecksTheProblemFirst) {
    expect_error([](Forward& f) { f.problem.kv_heads = 3; }, "kv_heads = 3");
}

TEST_F(RunForward, NamesTheVariantThatRefuses) {
    Forward forward = args();
    try {
        run_forward(fake_stage({"90f"}).variants[0], forward);
        FAIL();
    } catch (const Refused& error) {
        EXPECT_STREQ(error.what(), "90f narrow: dtype=f32: f16 is accepted; 90a does all types");
    }
}

TEST_F(RunForward, RejectsNullPointers) {
    expect_error([](Forward& f) { f.q.data = nullptr; }, "Q is a null pointer");
    expect_error([](Forward& f) { f.k.data = nullptr; }, "K is a null pointer");
    expect_error([](Forward& f) { f.v.data = nullptr; }, "V is a null pointer");
    expect_error([](Forward& f) { f.o.data = nullptr; }, "O is a null pointer");
    expect_error([](Forward& f) { f.lse = nullptr; }, "LSE is a null pointer");
}

TEST_F(RunForward, RejectsMisalignedPointers) {
    expect_error([&](Forward& f) { f.q.data = at(q_, 2); }, "its element size, 4 bytes");
    expect_error([&](Forward& f) { f.lse = reinterpret_cast<float*>(at(lse_, 1)); }, "LSE starts at");
    problem_.dtype = DType::f16;
    expect_error([&](Forward& f) { f.v.data = at(v_, 1); }, "its element size, 2 bytes");
    Forward forward = args();
    forward.q.data = at(q_, 2);  // half a word is right for f16
    run_forward(fake_stage().variants[0], forward);
    synchronize(forward.exec.stream);
}

TEST_F(RunForward, RejectsStridesThatRunRowsTogether) {
    expect_error([](Forward& f) { f.k.strides[2] = 3; }, "K has a row stride of 3 elements; at least head_dim=4");
    expect_error([](Forward& f) { f.v.strides[1] = -20; }, "V has a head stride of -20");
    expect_error([](Forward& f) { f.q.strides[0] = -1; }, "Q has a batch stride of -1");
}

TEST_F(RunForward, RejectsAnOutputThatOverlapsItself) {
    expect_error([](Forward& f) { f.o.strides[1] = 0; }, "O overlaps itself");
    expect_error([](Forward& f) { f.o.strides = {24, 8, 4}; }, "O overlaps itself");  // head 1 starts in row 2 of head 0
    expect_error([](Forward& f) { f.o.strides = {24, 4, 4}; }, "O overlaps itself");  // interleaved heads need rows twice as far apart
    Forward broadcast = args();
    broadcast.q.strides[1] = 0;       // inputs may: all heads read one
    broadcast.o.strides = {0, 4, 8};  // (B, N, H, d) memory; the stride of a single batch means nothing
    run_forward(fake_stage().variants[0], broadcast);
    synchronize(broadcast.exec.stream);
}

TEST_F(RunForward, RejectsOutputsOnTopOfInputs) {
    expect_error([](Forward& f) { f.o.data = f.q.data; }, "O shares memory with Q");
    expect_error([&](Forward& f) { f.o.data = at(k_, 79 - 3); }, "O shares memory with K");  // K's last word
    expect_error([](Forward& f) { f.lse = static_cast<float*>(f.v.data); }, "LSE shares memory with V");
    expect_error([&](Forward& f) { f.lse = reinterpret_cast<float*>(at(o_, 92)); }, "LSE shares memory with O");
    Forward beside = args();
    beside.lse = reinterpret_cast<float*>(at(o_, 96));
    run_forward(fake_stage().variants[0], beside);
    synchronize(beside.exec.stream);
}

TEST_F(RunForward, HoldsTheLaunchToTheDevicesSharedMemory) {
    Variant greedy = fake_stage({"90g"}).variants[0];
    greedy.refuses = [](const Problem&, const Device&) -> std::optional<std::string> { return std::nullopt; };
    Forward forward = args();
    forward.device.shared_memory_per_block = 16 * 1024;
    EXPECT_THROW(run_forward(greedy, forward), simt::Error);
}

/// A valid backward launch of B=1 Hq=2 Hkv=1 Nq=3 Nkv=5 d=4, to be spoilt. The variant does nothing.
class RunBackward : public RunForward {
protected:
    BackwardVariant variant_{.id = "90x",
                             .name = "idle",
                             .refuses = [](const Problem& p, const Device&) -> std::optional<std::string> {
                                 if (p.causal) return "causal is not done";
                                 return std::nullopt;
                             },
                             .forward = [](Forward&) {},
                             .any_forward = true,
                             .backward = [](Backward&) {},
                             .products = 5,
                             .movement = [](const Problem& p, const Device&) { return standard_backward_movement(p); },
                             .saved_bytes = [](const Problem&, const Device&) -> std::size_t { return 0; },
                             .workspace_bytes = [](const Problem&, const Device&) -> std::size_t { return 0; },
                             .unit = [](DType) { return Unit::fp32; }};

    Backward backward() {
        const Forward f = args();
        return {problem_,
                f.q,
                f.k,
                f.v,
                f.o,
                {d_o_.data(), problem_.q_strides()},
                f.lse,
                {dq_.data(), problem_.q_strides()},
                {dk_.data(), problem_.kv_strides()},
                {dv_.data(), problem_.kv_strides()},
                device_,
                {},
                workspace_};
    }
    template <class Error = InvalidArgument>
    void expect_error(const std::function<void(Backward&)>& spoil, const std::string& message) {
        Backward args = backward();
        spoil(args);
        try {
            run_backward(variant_, args);
            ADD_FAILURE() << "accepted; expected: " << message;
        } catch (const Error& error) {
            EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
        }
    }

    DeviceBuffer d_o_{1024}, dq_{1024}, dk_{1024}, dv_{1024};
};

TEST_F(RunBackward, AcceptsWhatIsRight) {
    Backward args = backward();
    run_backward(variant_, args);
    EXPECT_EQ(args.exec.shared_memory_limit, device_.shared_memory_per_block);
}

TEST_F(RunBackward, NamesTheVariantThatRefuses) {
    expect_error<Refused>([](Backward& b) { b.problem.causal = true; }, "90x idle: causal is not done");
    expect_error([](Backward& b) { b.problem.kv_heads = 3; }, "kv_heads = 3");
    Forward forward = args();
    forward.problem.causal = true;
    EXPECT_THROW(run_forward(variant_, forward), Refused);
}

TEST_F(RunBackward, ChecksEveryTensor) {
    expect_error([](Backward& b) { b.o.data = nullptr; }, "O is a null pointer");
    expect_error([](Backward& b) { b.d_o.data = nullptr; }, "dO is a null pointer");
    expect_error([](Backward& b) { b.lse = nullptr; }, "LSE is a null pointer");
    expect_error([](Backward& b) { b.dv.data = nullptr; }, "dV is a null pointer");
    expect_error([&](Backward& b) { b.dk.data = at(dk_, 2); }, "its element size, 4 bytes");
    expect_error([](Backward& b) { b.d_o.strides[2] = 3; }, "dO has a row stride of 3 elements; at least head_dim=4");
    expect_error([](Backward& b) { b.dq.strides[1] = 0; }, "dQ overlaps itself");
}

TEST_F(RunBackward, RejectsOutputsOnTopOfOthers) {
    expect_error([](Backward& b) { b.dq.data = b.q.data; }, "dQ shares memory with Q");
    expect_error([](Backward& b) { b.dv.data = b.d_o.data; }, "dV shares memory with dO");
    expect_error([](Backward& b) { b.dk.data = const_cast<float*>(b.lse); }, "dK shares memory with LSE");
    expect_error([](Backward& b) { b.dv.data = b.dk.data; }, "dV shares memory with dK");
    Backward shared = backward();
    shared.d_o = shared.o;  // inputs may
    run_backward(variant_, shared);
}

TEST(Workspace, KeepsBuffersByNameAndPoisonsThem) {
    try {
        Device::current();
    } catch (const Refused& reason) {
        GTEST_SKIP() << reason.what();
    }
    Workspace workspace;
    EXPECT_EQ(workspace.allocated(), 0u);
    float* const s = workspace.get<float>("S", 100);
    workspace.get<double>("l", 10);
    EXPECT_EQ(workspace.allocated(), 480u);
    EXPECT_EQ(workspace.get<float>("S", 100), s);
    EXPECT_EQ(workspace.allocated(), 480u);
    workspace.get<float>("S", 50);
    EXPECT_EQ(workspace.allocated(), 280u);
    if (emulating) {
        const unsigned char poison[4] = {0xFF, 0xFF, 0xFF, 0xFF};
        EXPECT_EQ(std::memcmp(workspace.get<float>("S", 50) + 49, poison, 4), 0);
    }
}

TEST(Workspace, RefusesWhatTheDeviceHasNot) {
#ifdef __SANITIZE_ADDRESS__
    GTEST_SKIP() << "AddressSanitizer ends the program instead of throwing std::bad_alloc";
#endif
    try {
        Device::current();
    } catch (const Refused& reason) {
        GTEST_SKIP() << reason.what();
    }
    Workspace workspace;
    workspace.get<float>("l", 4);
    try {
        workspace.get<float>("S", std::size_t{1} << 55);
        FAIL();
    } catch (const Refused& error) {
        EXPECT_NE(std::string(error.what()).find("workspace S needs 144115188075855872 bytes"), std::string::npos) << error.what();
    }
    EXPECT_EQ(workspace.allocated(), 16u);
}

TEST(Device, EmulatorPlaysAGpu) {
    if (!emulating) GTEST_SKIP();
    const Gpu& gpu = find_gpu("rtx4090");
    const Device device = Device::current(&gpu);
    EXPECT_TRUE(device.emulated);
    EXPECT_EQ(device.name, "emulator (as " + std::string(gpu.name) + ")");
    EXPECT_EQ(device.sms, gpu.sms);
    EXPECT_EQ(device.compute_capability, 89);
    EXPECT_EQ(device.shared_memory_per_block, gpu.shared_memory_per_block);
    EXPECT_EQ(Device::current().name, "emulator");
}

}  // namespace
