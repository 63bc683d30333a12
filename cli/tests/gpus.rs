//! `run --backend cuda`: on the emulated GPU, and without any.

mod support;

use support::Place;

fn arguments() -> [&'static str; 8] {
    [
        "run",
        "plan.json",
        "--data",
        "text.txt",
        "--steps",
        "3",
        "--backend",
        "cuda",
    ]
}

/// The words without a GPU. Where there is one, the run succeeds.
#[test]
fn without_a_gpu_the_run_says_so_and_names_the_emulator() {
    let place = Place::with_plan();
    let done = place.run(&arguments());
    if done.code == 0 {
        eprintln!("skipped: this machine has a GPU");
        return;
    }
    done.expect(6)
        .says(&["NVIDIA", "cargo build --release --examples -p emulator"]);
    assert!(!place.exists("run.json"));
}

#[test]
fn a_plan_runs_on_the_emulated_gpu_as_on_processors() {
    let Some(folder) = support::emulator() else {
        return;
    };
    let place = Place::with_plan();
    let of_run = |place: &Place| -> serde_json::Value {
        serde_json::from_slice(&place.read("run.json")).expect("run.json is JSON")
    };
    place.run(&arguments()[..6]).expect(0);
    let on_cpu = of_run(&place);
    let done = place.run_with(
        &arguments(),
        &[("LD_LIBRARY_PATH", &folder.to_string_lossy())],
    );
    let done = done.expect(0);
    assert!(done.out.contains("MFU unknown"), "{}", done.out);
    // Four ranks on one GPU.
    let met = "Ranks met by copies through the host's memory.";
    assert!(done.out.contains(met), "{}", done.out);
    let done = done.says(&["several ranks share a GPU", "NCCL_MULTI_RANK_GPU_ENABLE=1"]);
    let on_gpu = of_run(&place);
    assert_eq!(on_gpu["backend"], "cuda-emulated");
    assert_eq!(on_gpu["executed_on"], "4 ranks on 1 x Emulated GPU");
    let losses = |run: &serde_json::Value| -> Vec<f64> {
        let steps = run["steps"].as_array().expect("steps");
        steps.iter().filter_map(|s| s["loss"].as_f64()).collect()
    };
    assert_eq!(losses(&on_gpu).len(), 3);
    for (a, b) in losses(&on_gpu).into_iter().zip(losses(&on_cpu)) {
        assert!((a - b).abs() < 1e-5 * b, "{a} against {b}");
    }
    assert!(
        done.out.contains("Matrices were multiplied by cuBLASLt."),
        "{}",
        done.out
    );
    place.run(&["compare", "plan.json", "run.json"]).expect(0);
    // A checkpoint of processors goes on on GPUs: by a rate that changes nothing, all bits are
    // there.
    let cpu_state = [&arguments()[..6], &["--checkpoint", "cpu"]].concat();
    place.run(&cpu_state).expect(0);
    let more = ["--resume", "cpu", "--checkpoint", "gpu", "--lr", "1e-30"];
    let library = ("LD_LIBRARY_PATH", &*folder.to_string_lossy());
    let resumed = [&arguments()[..], &more].concat();
    place.run_with(&resumed, &[library]).expect(0);
    let [cpu, gpu] = ["cpu", "gpu"].map(|state| {
        let to = format!("weights-{state}");
        let convert = ["checkpoint", "convert", state, "--config", "config.json"];
        place.run(&[&convert[..], &["-o", &to]].concat()).expect(0);
        place.read(&format!("{to}/model.safetensors"))
    });
    assert!(cpu == gpu, "parameters differ");
    // Plain kernels give the same losses.
    let plain = [&arguments()[..], &["--matmuls", "plain"]].concat();
    let done = place.run_with(&plain, &[library]).expect(0);
    assert!(done.out.contains("by plain kernels."), "{}", done.out);
    for (a, b) in losses(&of_run(&place)).into_iter().zip(losses(&on_cpu)) {
        assert!((a - b).abs() < 1e-5 * b, "{a} against {b}");
    }
    // A device with less memory than the ranks need.
    let small = ("MESHWRIGHT_EMULATOR_BYTES", "100000000");
    let done = place.run_with(&arguments(), &[library, small]);
    done.expect(6)
        .says(&["4 ranks of the plan on GPU 0 need", "it has 95.37 MiB free"]);
}

/// As where a scheduler has put a job on the wrong hosts: that is found before it begins.
#[test]
fn a_plan_for_other_gpus_is_refused_unless_it_is_asked_for() {
    let Some(folder) = support::emulator() else {
        return;
    };
    let place = Place::new();
    let compile = ["compile", "config.json", "--cluster", "h100-sxm*2+nvlink4"];
    let more = ["--global-batch", "2", "--precision", "f32"];
    place.run(&[&compile[..], &more].concat()).expect(0);
    let library = [
        ("LD_LIBRARY_PATH", &*folder.to_string_lossy()),
        ("MESHWRIGHT_EMULATOR_GPUS", "2"),
    ];
    let refused = place.run_with(&arguments(), &library).expect(6);
    let differs = ["is for NVIDIA H100", "Emulated GPU, is another one: it has"];
    refused.says(&differs).says(&["--on-other-gpus"]);
    assert!(!place.exists("run.json"));
    let asked = [&arguments()[..], &["--on-other-gpus"]].concat();
    let done = place.run_with(&asked, &library).expect(0).says(&differs);
    done.says(&["warning: ", "do not apply"]);
    assert!(place.exists("run.json"));
}

#[test]
fn ranks_with_a_gpu_each_meet_by_nccl() {
    let Some(folder) = support::emulator() else {
        return;
    };
    let place = Place::with_plan();
    let variables = [
        ("LD_LIBRARY_PATH", &*folder.to_string_lossy()),
        ("MESHWRIGHT_EMULATOR_GPUS", "4"),
    ];
    let mut losses = Vec::new();
    for (flags, met) in [
        (&[][..], "Ranks met by NCCL 2.30.0."),
        (&["--processes"], "Ranks met by NCCL 2.30.0."),
        (
            &["--fabric", "host"][..],
            "Ranks met by copies through the host's memory.",
        ),
    ] {
        let done = place.run_with(&[&arguments()[..], flags].concat(), &variables);
        let done = done.expect(0);
        assert!(done.out.contains(met), "{}", done.out);
        // The plan is for CPU ranks, whose sums have a fixed order.
        let notes = done
            .err
            .matches("note: the plan's sums have a fixed order")
            .count();
        assert_eq!(notes > 0, met.contains("NCCL"), "{}", done.err);
        let run: serde_json::Value =
            serde_json::from_slice(&place.read("run.json")).expect("run.json is JSON");
        assert_eq!(run["executed_on"], "4 ranks on 4 x Emulated GPU");
        let steps = run["steps"].as_array().expect("steps").iter();
        losses.push(steps.filter_map(|s| s["loss"].as_f64()).collect::<Vec<_>>());
    }
    assert_eq!(losses[0].len(), 3);
    for other in &losses[1..] {
        for (a, b) in losses[0].iter().zip(other) {
            assert!((a - b).abs() < 1e-5 * b, "{a} against {b}");
        }
    }
    // Four ranks on one GPU are asked for by a variable.
    let asked = [&arguments()[..], &["--fabric", "nccl"][..]].concat();
    let done = place.run_with(&asked, &variables[..1]).expect(6);
    done.says(&[
        "several ranks share a GPU",
        "set NCCL_MULTI_RANK_GPU_ENABLE=1",
        "NCCL_RUNTIME_CONNECT=0",
        "CUDA_DEVICE_MAX_CONNECTIONS=32",
    ]);
}

/// Ranks that wait for each other on one GPU, where the driver may wait for whichever was first, and
/// connections are shared by streams: two communicators of ZeRO-3 are at work at once.
#[test]
fn ranks_on_one_gpu_meet_by_nccl() {
    let Some(folder) = support::emulator() else {
        return;
    };
    let place = Place::with_plan();
    let with = |pins: &[&str]| {
        let compile = [
            "compile",
            "config.json",
            "--cluster",
            "cpu-default",
            "--ranks",
            "4",
        ];
        let pins: Vec<&str> = pins.iter().flat_map(|pin| ["--pin", pin]).collect();
        let size = ["--global-batch", "4", "-o", "plan.json"];
        place.run(&[&compile[..], &size, &pins].concat()).expect(0);
    };
    let library = ("LD_LIBRARY_PATH", &*folder.to_string_lossy());
    let sharing = [
        library,
        ("NCCL_MULTI_RANK_GPU_ENABLE", "1"),
        ("NCCL_RUNTIME_CONNECT", "0"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
    ];
    for pins in [
        &["data=4", "zero=3"][..],
        &["pipeline=2", "data=1", "tensor=2"],
    ] {
        with(pins);
        let losses = [("host", &sharing[..1]), ("nccl", &sharing)].map(|(fabric, variables)| {
            let run = [&arguments()[..], &["--fabric", fabric]].concat();
            place.run_with(&run, variables).expect(0);
            let run: serde_json::Value =
                serde_json::from_slice(&place.read("run.json")).expect("run.json is JSON");
            assert_eq!(run["executed_on"], "4 ranks on 1 x Emulated GPU");
            let steps = run["steps"].as_array().expect("steps").iter();
            steps.filter_map(|s| s["loss"].as_f64()).collect::<Vec<_>>()
        });
        assert_eq!(losses[0].len(), 3);
        for (a, b) in losses[0].iter().zip(&losses[1]) {
            assert!((a - b).abs() < 1e-5 * b, "{pins:?}: {a} against {b}");
        }
    }
}

/// Values that are no numbers: GPUs stop at the step at which processors do, with their states as they
/// were, and name the tensor that processors name, however they meet.
#[test]
fn the_first_tensor_that_is_no_number_is_named_on_gpus() {
    let Some(folder) = support::emulator() else {
        return;
    };
    let place = Place::with_plan();
    let wild = ["--steps", "9", "--lr", "1e30", "-o", "wild.json"];
    let said = |args: &[&str], variables: &[(&str, &str)]| {
        let done = place.run_with(&[args, &wild].concat(), variables).expect(6);
        assert!(!place.exists("wild.json"));
        let flat = support::flat(&done.err);
        let about = flat.split_once("error: ").map_or(&*flat, |words| words.1);
        about.to_string()
    };
    let on_cpu = said(&arguments()[..4], &[]);
    assert!(on_cpu.contains(" of step 1 is "), "{on_cpu}");
    let named = |words: &str| {
        let tensor = words.split_once("the first tensor that is no number: `");
        let tensor = tensor.unwrap_or_else(|| panic!("none is named: {words}"));
        tensor
            .1
            .split_once(" has ")
            .map(|words| words.0.to_string())
    };
    let gpus = [
        ("LD_LIBRARY_PATH", &*folder.to_string_lossy()),
        ("MESHWRIGHT_EMULATOR_GPUS", "4"),
        ("NCCL_MULTI_RANK_GPU_ENABLE", "1"),
        ("NCCL_RUNTIME_CONNECT", "0"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
    ];
    let one = [&gpus[..1], &gpus[2..]].concat();
    let backend = ["--backend", "cuda", "--fabric"];
    for (fabric, more, variables) in [
        ("host", &[][..], &gpus[..1]),
        ("nccl", &["--processes"], &gpus),
        ("nccl", &[], &one),
    ] {
        let args = [&arguments()[..4], &backend, &[fabric], more].concat();
        let on_gpu = said(&args, variables);
        assert!(on_gpu.contains(" of step 1 is "), "{on_gpu}");
        assert_eq!(named(&on_gpu), named(&on_cpu), "{on_gpu}");
    }
}

#[test]
fn flags_of_gpus_are_for_gpus() {
    let place = Place::with_plan();
    for flag in [
        &["--matmuls", "tuned"][..],
        &["--tf32"][..],
        &["--on-other-gpus"][..],
        &["--fabric", "host"][..],
    ] {
        let arguments = [&arguments()[..6], flag].concat();
        place.run(&arguments).expect(2).says(&["--backend cuda"]);
    }
}
