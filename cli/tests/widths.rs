//! All that a person reads fits 100 columns: the report of every verb and its errors, also where names
//! are long.

#![allow(clippy::unwrap_used)] // A test may stop where it likes.

mod support;

use support::{Place, assert_fits, repository};

/// A place whose model, cluster and devices have long names, and a plan for four of its ranks.
fn long() -> Place {
    let place = Place::new();
    let cluster = repository().join("clusters/cpu-default.toml");
    let cluster = std::fs::read_to_string(cluster).unwrap();
    let (first, rest) = cluster.split_once("name = ").unwrap();
    let (_, rest) = rest.split_once('\n').unwrap();
    let name = "the machine in the corner of the room that nobody dares to switch off ".repeat(3);
    place.write(
        "long.toml",
        format!("{first}name = \"{}\"\n{rest}", name.trim()),
    );
    let folder = "a-model-of-which-there-are-many-versions-and-this-is-the-last-one";
    std::fs::create_dir(place.path(folder)).unwrap();
    place.write(&format!("{folder}/config.json"), support::CONFIG);
    let model = format!("{folder}/config.json");
    let args = ["--cluster", "long.toml", "--global-batch", "8", "-o", PLAN];
    let pins = [
        "--pin",
        "pipeline=2 data=2 microbatch=4 zero=1 schedule=1f1b recompute=none",
        "--pin",
        "spec:h.*.mlp.fc.weight=[_,_]",
        "--pin",
        "recompute:h.0.mlp.act=yes",
    ];
    let done = place
        .run(&[&["compile", &model], &args[..], &pins].concat())
        .expect(0);
    assert_fits(&done.out);
    assert_fits(&done.err);
    place
}

const PLAN: &str = "the-plan-that-was-made-on-a-monday-for-the-machine-in-the-corner.json";

/// Runs, and looks at all lines.
fn fits(place: &Place, code: i32, args: &[&str]) {
    let done = place.run(args);
    assert_eq!(done.code, code, "{args:?}:\n{}{}", done.out, done.err);
    assert_fits(&done.out);
    assert_fits(&done.err);
}

#[test]
fn reports_of_plans_fit() {
    let place = long();
    for verb in ["inspect", "explain", "simulate", "check"] {
        fits(&place, 0, &[verb, PLAN]);
    }
    fits(&place, 0, &["inspect", PLAN, "--layers"]);
    fits(&place, 0, &["inspect", PLAN, "--against", PLAN]);
    fits(&place, 0, &["explain", PLAN, "--roofline"]);
    fits(&place, 0, &["explain", PLAN, "--why-not", "zero=0"]);
    fits(
        &place,
        0,
        &["what-if", PLAN, "--global-batch", "2x", "-o", "new.json"],
    );
    fits(&place, 2, &["what-if", PLAN, "--set", "link.nothing=2x"]);
    let export = ["export", PLAN, "--to", "jax", "-o"];
    fits(&place, 0, &[&export[..], &["a-folder-for-it"]].concat());
}

#[test]
fn reports_of_runs_fit() {
    let place = long();
    let run = [
        "run",
        PLAN,
        "--data",
        "text.txt",
        "--steps",
        "2",
        "--checkpoint",
    ];
    let folder = "the-state-of-the-training-that-was-begun-on-a-monday";
    fits(&place, 0, &[&run[..], &[folder, "-o", "run.json"]].concat());
    fits(&place, 0, &["compare", PLAN, "run.json"]);
    fits(&place, 0, &["compare", PLAN, "run.json", "--verbose"]);
    for verb in ["inspect", "verify"] {
        fits(&place, 0, &["checkpoint", verb, folder]);
    }
    fits(&place, 3, &["doctor", PLAN, folder]);
}

#[test]
fn reports_of_searches_fit() {
    let place = Place::new();
    let verbose = [
        "compile",
        "config.json",
        "--cluster",
        "dgx-h100",
        "--verbose",
    ];
    fits(&place, 0, &verbose);
    let small = ["--global-batch", "8", "--precision", "bf16"];
    let megatron = [
        "--for",
        "megatron-core+no-tensor-overlap+no-gradient-overlap+grads-bf16",
    ];
    let compile = [
        "compile",
        "tiny-llama",
        "--cluster",
        "dgx-h100",
        "-o",
        "plan.json",
    ];
    fits(&place, 0, &[&compile[..], &small, &megatron].concat());
    fits(&place, 0, &["inspect", "plan.json"]);
    fits(&place, 0, &["export", "plan.json", "--to", "megatron-core"]);
    let composed = "h100-sxm*8+nvlink4+infiniband-ndr,a100-sxm-40gb*4+nvlink3-mesh+efa-100*2";
    let sweep = [
        "sweep",
        "config.json",
        "--cluster",
        composed,
        "--tokens",
        "1B",
    ];
    fits(&place, 0, &[&sweep[..], &small].concat());
    let fits_on = [
        "fits",
        "config.json",
        "--device",
        "a100-sxm-40gb*4+nvlink3-mesh+efa-100*2",
    ];
    fits(&place, 0, &[&fits_on[..], &small].concat());
    fits(&place, 0, &["presets"]);
    fits(&place, 0, &["models"]);
}

#[test]
fn reports_of_jobs_and_tables_fit() {
    let place = Place::new();
    let job = repository().join("examples/jobs/gpt-2.7b-megatron.sh");
    let args = [
        "import-job",
        job.to_str().unwrap(),
        "--cluster",
        "dgx-h100",
        "--set",
        "NNODES=1",
    ];
    fits(
        &place,
        0,
        &[&args[..], &["--no-search", "-o", "job.json", "--verbose"]].concat(),
    );
    fits(&place, 0, &["inspect", "job.json"]);
    fits(&place, 0, &["check", "job.json"]);
    let header = "gpu,gpus_total,gpus_per_node,interconnect,framework,layers,hidden,heads,ffn_hidden,vocab,seq_len,global_batch,micro_batch,mlp_type,precision";
    let row = "8,8,NVLink4+NVSwitch,Megatron-Core,2,512,4,512,32768,512,16,1";
    let cells = [
        format!("H100-80GB,{row},gelu,bf16"),
        format!("H100-80GB,{row},gelu,bf17"),
        format!("X100-80GB,{row},gelu,bf16"),
        format!("H100-80GB,{row},swish,bf16").replace("Megatron-Core", "Megatron-Kern"),
    ];
    place.write("rows.csv", format!("{header}\n{}\n", cells.join("\n")));
    fits(&place, 0, &["predict", "rows.csv", "-o", "predicted.csv"]);
    place.write("rows.csv", format!("{header}\n{}\n", cells[1..].join("\n")));
    fits(&place, 4, &["predict", "rows.csv", "-o", "predicted.csv"]);
}

#[test]
fn errors_fit_and_show_the_place_in_a_long_line() {
    let place = Place::new();
    let refuses = |args: &[&str], codes: &[i32]| {
        let done = place.refuses(args, codes);
        assert_fits(&done.err);
        done.err
    };
    // A configuration in one line, wrong in its middle.
    let one_line = support::CONFIG.replace('\n', " ");
    let padding = format!("\"comment\": \"{}\", ", "words ".repeat(60));
    let wrong = one_line.replace("\"n_layer\": 2", "\"n_layer\": @2");
    let text = wrong.replacen("\"n_head\"", &format!("{padding}\"n_head\""), 1);
    place.write(
        "bad.json",
        text.replacen("\"vocab_size\"", &format!("{padding}\"vocab_size\""), 1),
    );
    let said = refuses(&["compile", "bad.json", "--cluster", "cpu-default"], &[3]);
    assert!(
        said.contains("\"n_layer\": @2") && said.contains('…'),
        "{said}"
    );
    let toml = std::fs::read_to_string(repository().join("clusters/cpu-default.toml")).unwrap();
    let toml = format!("{toml}\n{} = 1\n", "unknown_key_that_goes_on".repeat(8));
    place.write("bad.toml", toml);
    refuses(&["compile", "config.json", "--cluster", "bad.toml"], &[3]);
    let cluster = ["compile", "config.json", "--cluster"];
    refuses(
        &[
            &cluster[..],
            &["no such cluster, and many more words ".repeat(4).as_str()],
        ]
        .concat(),
        &[3],
    );
    let compile = [&cluster[..], &["cpu-default"]].concat();
    let nonsense = "with-a-name-that-is-too-long-to-be-one".repeat(2);
    for flag in [
        "--pin",
        "--for",
        "--preset",
        "--layers",
        "--precision",
        "--global-batch",
    ] {
        refuses(&[&compile[..], &[flag, &nonsense]].concat(), &[2]);
    }
    // The parser of the command line, which breaks no line by itself.
    for verb in [
        "compile",
        "inspect",
        "explain",
        "what-if",
        "sweep",
        "fits",
        "check",
        "lower",
        "export",
        "simulate",
        "run",
        "doctor",
        "checkpoint",
        "compare",
        "predict",
        "import-job",
        "solve",
    ] {
        refuses(&[verb], &[2]);
        refuses(&[verb, "--an-unknown-flag"], &[2]);
        let help = place.run(&[verb, "--help"]).expect(0);
        assert_fits(&help.out);
    }
}
