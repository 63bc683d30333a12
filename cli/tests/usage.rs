//! Flags, help and exit codes.

#![allow(clippy::unwrap_used)] // A test may stop where it likes.

mod support;

use support::{Place, assert_no_panic, repository};

#[test]
fn every_verb_has_examples_and_exit_codes_in_its_help() {
    let place = Place::new();
    for verb in [
        "compile",
        "inspect",
        "check",
        "lower",
        "simulate",
        "run",
        "checkpoint",
        "doctor",
        "compare",
        "calibrate",
        "predict",
        "solve",
        "schema",
        "presets",
        "models",
    ] {
        let help = place.run(&[verb, "--help"]).expect(0).out;
        assert!(
            help.contains("Example")
                && help.contains(&format!("meshwright {verb}"))
                && help.contains("Exit codes: 0 done; 2 usage"),
            "{help}"
        );
    }
    assert!(place.run(&["--help"]).expect(0).out.contains("Exit codes"));
}

#[test]
fn what_makes_no_sense_is_a_usage_error() {
    let place = Place::new();
    let compile = |more: &[&str]| {
        let mut args = vec!["compile", "config.json", "--cluster", "cpu-default"];
        args.extend(more);
        place.refuses(&args, &[2])
    };
    place.refuses(&["compilate"], &[2]);
    place.refuses(&["compile", "config.json"], &[2]).says(&[
        "--cluster",
        "meshwright presets",
        "meshwright calibrate",
    ]);
    compile(&["--effort", "9"]).says(&["a whole number from 1 to 8"]);
    compile(&["--effort", "more"]).says(&["a whole number from 1 to 8"]);
    // A flag of another verb is said to be one.
    compile(&["--lr", "1"]).says(&["--lr is a flag of `meshwright run`"]);
    compile(&["--nonsense"]).says(&["unexpected argument '--nonsense'"]);
    compile(&["--pin", "data"]).says(&["pin `data`", "key=value"]);
    compile(&["--pin", "datum=2"]).says(&["unknown key `datum`"]);
    compile(&["--pin", "pipelin=2"]).says(&["did you mean `pipeline`?", "virtual=N"]);
    compile(&["--pin", "tp=2"]).says(&["did you mean `tensor`?"]);
    compile(&["--pin", "virtual=2"]).says(&["virtual=2", "pipeline=2 or more"]);
    compile(&["--pin", "virtual=x"]).says(&["not a degree", "needs pipeline"]);
    let level = compile(&["--pin", "zero=4"]).says(&["not a ZeRO level", "zero=0..3"]);
    assert!(!level.err.contains("tensor=N"), "{}", level.err);
    compile(&["--pin", "spec:h.0.x=oops"]).says(&["not a spec", "spec:TENSOR=[axes,...]"]);
    // Pins that do not fit the model or the cluster say what would.
    compile(&["--pin", "spec:h.0.mlp.fc.weight=[_,z]"])
        .says(&["no axis `z`", "its axes are x and y"]);
    compile(&["--pin", "data=2 tensor=2 spec:h.0.mlp.fc.weight=[_,y]"])
        .says(&["no axis `y`", "its axes are data and tensor"]);
    compile(&["--pin", "spec:h.0.mlp.fc.weight=[_,x,_]"]).says(&["has 3 dims", "has 2"]);
    compile(&["--pin", "spec:h.9.weight=[_,x]"]).says(&["no tensor", "h.9.weight"]);
    compile(&["--pin", "data=3 tensor=2"]).says(&[
        "data=3 x tensor=2, together 6 devices, does not divide the 4 devices",
        "data=1 or 2",
    ]);
    compile(&["--pin", "data=2", "--pin", "data=4"])
        .says(&["pin `data=4`", "contradicts `data=2`"]);
    compile(&["--pin", "recompute:nope=yes"]).says(&["matches no op"]);
    compile(&["--pin", "split=1/1"]).says(&["split has 2 layers"]);
    // Four layers make no eight stages.
    compile(&["--ranks", "8", "--pin", "pipeline=8"]).says(&["needs as many layers", "--layers 8"]);
    compile(&["--pin", "data=3"]).says(&["data=3 does not divide", "data=1, 2 or 4"]);
    compile(&["--pin", "data=2 tensor=2 pipeline=2"]).says(&["is not the 4 devices", "pipeline=1"]);
    compile(&["--pin", "microbatch=3"])
        .says(&["does not divide the global batch 8", "1, 2, 4 or 8"]);
    compile(&["--pin", "data=4 microbatch=2"]).says(&["microbatch=2", "data=2 or less"]);
    compile(&["--global-batch", "0"]).says(&["global_batch is 0", "--global-batch"]);
    compile(&["--global-batch", "-1"]);
    compile(&["--dropout", "nan"]).says(&["dropout is NaN"]);
    compile(&["--weight-decay", "1e999"]).says(&["weight_decay is inf"]);
    compile(&["--clip-norm", "much"]).says(&["--clip-norm is `much`"]);
    compile(&["--optimizer", "sgd", "--beta1", "0.9"]).says(&["--beta1 has no meaning"]);
    compile(&["--precision", "f64"]);
    compile(&["--hosts", "0"]);
    compile(&["--hosts", "2"]).says(&["--hosts 2", "no link joins", "--ranks"]);
    compile(&["--ranks", "4000000000"]).says(&["--ranks 4000000000"]);
    compile(&["--ranks", "5000"]).says(&["--ranks 5000", "1024 at most"]);
    compile(&["-o", "-"]).says(&["`-` is no file", "./-"]);
    // A negative number is the flag's to refuse: it is not taken for a flag.
    let negative = compile(&["--weight-decay", "-0.1"]).says(&["weight_decay is -0.1"]);
    assert!(!negative.err.contains("tip:"), "{}", negative.err);
    place
        .refuses(
            &[
                "compile",
                "config.json",
                "--cluster",
                "dgx-h100",
                "--ranks",
                "4",
            ],
            &[2],
        )
        .says(&["do not share processors", "--hosts"]);
    place.refuses(&["solve", "x.json", "--time-limit", "-3"], &[2]);
    place.refuses(&["solve", "x.json", "--time-limit", "nan"], &[2]);
    place
        .refuses(
            &["run", "plan.json", "--data", "text.txt", "--lr", "nan"],
            &[2],
        )
        .says(&["learning rate is NaN"]);
    place
        .refuses(
            &[
                "run",
                "plan.json",
                "--data",
                "text.txt",
                "--lr",
                "1",
                "--min-lr",
                "2",
            ],
            &[2],
        )
        .says(&["above the peak"]);
    place.refuses(
        &[
            "run",
            "plan.json",
            "--data",
            "text.txt",
            "--save",
            "w.safetensors",
        ],
        &[2, 3],
    );
}

/// Every number of the command line, with what people type: an error in words, or a result; never a
/// panic, and no memory for a number alone.
#[test]
fn numbers_that_make_no_sense_are_refused_in_words() {
    let place = Place::new();
    let compile = ["compile", "config.json", "--cluster", "dgx-h100"];
    let run = ["run", "plan.json", "--data", "text.txt"];
    let solve = ["solve", "none.json"];
    let calibrate = ["calibrate", "-o", "no/such/cluster.toml"];
    let flags: [(&[&str], &[&str]); 4] = [
        (
            &compile,
            &[
                "--hosts",
                "--ranks",
                "--global-batch",
                "--sequence",
                "--expert-capacity",
                "--layers",
                "--beta1",
                "--eps",
                "--momentum",
                "--weight-decay",
                "--clip-norm",
                "--dropout",
                "--seed",
            ],
        ),
        (
            &run,
            &[
                "--steps",
                "--lr",
                "--warmup",
                "--min-lr",
                "--total-steps",
                "--validate-every",
                "--validation-fraction",
                "--validation-batches",
                "--profile",
                "--time-out",
            ],
        ),
        (
            &solve,
            &[
                "--time-limit",
                "--work-limit",
                "--threads",
                "--seed",
                "--gap",
            ],
        ),
        (&calibrate, &["--ranks"]),
    ];
    for (verb, flags) in flags {
        for flag in flags {
            for value in ["", "nan", "1e8", "-1", "18446744073709551615"] {
                let given = format!("{flag}={value}");
                let done = place.run(&[verb, &[given.as_str()][..]].concat());
                assert_no_panic(&done);
                assert!(
                    [0, 2, 3, 4, 6].contains(&done.code),
                    "{given}: {}",
                    done.err
                );
                for words in ["digit found", "empty string", "invalid float"] {
                    assert!(!done.err.contains(words), "{given}: {}", done.err);
                }
            }
        }
    }
    let said = |value: &str| {
        let given = format!("--hosts={value}");
        place.refuses(&[&compile[..], &[given.as_str()]].concat(), &[2])
    };
    said("1e8").says(&["expected a whole number in digits alone: 100000000"]);
    said("nan").says(&["'nan' for '--hosts <HOSTS>': expected a whole number in digits alone"]);
    said("").says(&["expected a whole number in digits alone"]);
    said("0").says(&["'0' for '--hosts <HOSTS>': expected 1 or more"]);
    said("99999999999").says(&["expected 1 to 4294967295"]);
    // Too many hosts are not helped by a link, which there is.
    let many = said("100000000").says(&["--hosts 100000000", "expected 1 to 1048576", "or fewer"]);
    assert!(!many.err.contains("give it a link"), "{}", many.err);
    // A clock does not count that far.
    let given = ["--time-out=18446744073709551615"];
    place
        .refuses(&[&run[..], &given].concat(), &[2])
        .says(&["expected 1 to 1000000000"]);
    for value in ["1e308", "1e18"] {
        let given = format!("--time-limit={value}");
        place
            .refuses(&[&solve[..], &[given.as_str()]].concat(), &[2])
            .says(&["expected a positive number of seconds, up to 1e12"]);
    }
    let given = ["--expert-capacity=0"];
    place
        .refuses(&[&compile[..], &given].concat(), &[2])
        .says(&["--expert-capacity 0"]);
    let given = ["--global-batch=-1"];
    place
        .refuses(&[&compile[..], &given].concat(), &[2])
        .says(&["expected a whole number that is not negative"]);
}

/// Shares of a step or of memory: what is the whole or more makes no sense, and a number without
/// `%` is not taken for percent.
#[test]
fn shares_are_below_the_whole() {
    let place = Place::new();
    let refuses = |flag: &str, value: &str| {
        let given = format!("{flag}={value}");
        place.refuses(
            &["compile", "config.json", "--cluster", "dgx-h100", &given],
            &[2],
        )
    };
    const RANGE: &str = "expected a share from 0% to below 100%, as 5% or 0.05";
    for flag in ["--tolerance", "--headroom"] {
        refuses(flag, "1").says(&[RANGE, "without `%` it is 100 percent", "for 1 percent 1%"]);
        refuses(flag, "100%").says(&["it is the whole or more", RANGE]);
        refuses(flag, "1e400").says(&["it is the whole or more", RANGE]);
        refuses(flag, "-1%").says(&["it is below zero", RANGE]);
        for value in ["12GBB", "5 parsecs", "nan", "", "%"] {
            refuses(flag, value).says(&["it is no share", RANGE]);
        }
    }
    // The parser takes it for a flag.
    let args = [
        "compile",
        "config.json",
        "--cluster",
        "dgx-h100",
        "--headroom",
        "-3GiB",
    ];
    place
        .refuses(&args, &[2])
        .says(&["`-3GiB` is below zero, which no amount is"]);
}

#[test]
fn misspelt_names_get_a_suggestion() {
    let place = Place::new();
    place
        .refuses(&["compile", "config.json", "--cluster", "dgx-h10"], &[3])
        .says(&["no cluster `dgx-h10`", "did you mean `dgx-h100`"]);
    place
        .refuses(&["compile", "config.json", "--cluster", "cpu"], &[3])
        .says(&["meshwright calibrate"]);
    place
        .refuses(&["compile", "confg.json", "--cluster", "cpu-default"], &[3])
        .says(&["did you mean `config.json`"]);
    let cluster = |name: &str| {
        let args = ["compile", "config.json", "--cluster", name];
        place.refuses(&args, &[3])
    };
    cluster("h100-sx*8+nvlink4").says(&["no device `h100-sx`", "did you mean `h100-sxm`?"]);
    cluster("h100-sxm*8+nvlnk4").says(&["no link `nvlnk4`", "did you mean `nvlink4`?"]);
    // One of another rate is not what was meant.
    let of_40 = cluster("rtx-4090*2+pcie4+ethernet-40").says(&[
        "no link `ethernet-40`",
        "there are `ethernet-10`, `ethernet-100`, `ethernet-25`;",
    ]);
    assert!(!of_40.err.contains("did you mean"), "{}", of_40.err);
    cluster("h100-sxm*8").says(&["DEVICE*COUNT+LINK"]);
    cluster("DGX-H100").says(&["did you mean `dgx-h100`?"]);
    cluster("h100").says(&["did you mean one of", "dgx-h100", "h100-pcie"]);
    // Devices and links are no clusters.
    let of_device = ["`h100-sxm` is a device", "dgx-h100", "DEVICE*COUNT+LINK"];
    cluster("h100-sxm").says(&of_device);
    place
        .refuses(&["presets", "h100-sxm"], &[3])
        .says(&of_device);
    place
        .refuses(&["presets", "nvlink4"], &[3])
        .says(&["`nvlink4` is a link"]);
    // An ending alone is no likeness.
    let far = cluster("config.toml").says(&["did you mean `config.json`?"]);
    assert!(!far.err.contains("text.txt"), "{}", far.err);
    place.write("s_ok.toml", b"");
    let far = cluster("foo.toml").says(&["check the path"]);
    assert!(!far.err.contains("s_ok"), "{}", far.err);
}

/// A folder is a model when it has a config.json; else it says which folders in it are.
#[test]
fn a_folder_without_a_model_names_those_in_it() {
    let place = Place::new();
    std::fs::create_dir_all(place.path("models/small")).unwrap();
    let args = ["compile", "models", "--cluster", "cpu-default"];
    place.refuses(&args, &[3]).says(&[
        "models: the folder has no config.json",
        "config.json (bloom, deepseek_v2, deepseek_v3",
    ]);
    place.write("models/small/config.json", support::CONFIG.as_bytes());
    place.refuses(&args, &[3]).says(&["models/small"]);
}

#[test]
fn clusters_are_printed_and_composed() {
    let place = Place::new();
    let compile = |cluster: &str, output: &str| {
        let args = ["compile", "config.json", "--cluster", cluster, "-o", output];
        place.run(&args).expect(0);
        place.read(output)
    };
    let printed = place.run(&["presets", "dgx-b200"]).expect(0).out;
    assert!(printed.contains("[sources]") && printed.contains("NVIDIA B200 SXM bf16"));
    place.write("b200.toml", printed.as_bytes());
    assert_eq!(
        compile("dgx-b200", "a.json"),
        compile("./b200.toml", "b.json"),
        "the printed cluster is the preset"
    );
    compile("a100-sxm-40gb*4+nvlink3-mesh+efa-100*2", "c.json");
    let refuses = |cluster: &str| {
        let args = ["compile", "config.json", "--cluster", cluster];
        place.refuses(&args, &[3])
    };
    refuses("a100+nvlink3+efa-100").says(&["no device `a100`", "a100-sxm-40gb"]);
    refuses("gb200+nvlink5+efa").says(&["no link `efa`", "efa-400"]);
    refuses("gb200*4000000000+nvlink5+roce-400").says(&["n_hosts x devices_per_host"]);
    place
        .refuses(&["presets", "abacus"], &[3])
        .says(&["presets are"]);
    let list = place.run(&["presets"]).expect(0).out;
    assert!(list.contains("gb300-nvl72") && list.contains("Links: efa-100"));
}

#[test]
fn constraints_that_nothing_meets_are_infeasible() {
    let place = Place::new();
    let cluster =
        std::fs::read_to_string(support::repository().join("clusters/cpu-default.toml")).unwrap();
    let small = cluster.replace("memory_bytes = 8589934592", "memory_bytes = 400000");
    assert_ne!(small, cluster);
    place.write("small.toml", small.as_bytes());
    place
        .refuses(
            &[
                "compile",
                "config.json",
                "--cluster",
                "small.toml",
                "--global-batch",
                "4",
            ],
            &[4],
        )
        .says(&["out of memory", "more than the", "none has a plan"]);
}

/// The table that the page on published runs shows is one that can be predicted.
#[test]
fn the_documents_table_of_runs_is_predicted() {
    let page = repository().join("docs/published.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (_, rest) = page.split_once("```csv\n").unwrap();
    let (table, _) = rest.split_once("```").unwrap();
    let place = Place::new();
    place.write("rows.csv", table.as_bytes());
    let done = place
        .run(&["predict", "rows.csv", "-o", "predicted.csv"])
        .expect(0);
    assert!(done.out.starts_with("1 of 1 run predicted"), "{}", done.out);
    assert_eq!(done.err, "");
}

/// Models by their names, in any folder; what is there under such a name comes first.
#[test]
fn models_that_are_built_in_have_names() {
    let place = Place::new();
    let list = place.run(&["models"]).expect(0).out;
    assert!(
        list.contains("llama-3.1-70b") && list.contains("images"),
        "{list}"
    );
    let printed = place.run(&["models", "tiny-gpt2"]).expect(0).out;
    let plan = |model: &str, output: &str| {
        let train = ["--global-batch", "4", "--sequence", "64", "-o", output];
        let args = ["compile", model, "--cluster", "cpu-default"];
        place.run(&[&args[..], &train].concat()).expect(0);
        String::from_utf8(place.read(output)).unwrap()
    };
    let by_name = plan("tiny-gpt2", "a.json");
    place.write("config.json", printed);
    // The same plan, but for what it is called.
    let by_file = plan("config.json", "b.json");
    let renamed = by_name.replacen("\"name\": \"tiny-gpt2\"", "\"name\": \"gpt2\"", 1);
    assert!(by_name != by_file && renamed == by_file);
    // Another model in a folder of that name.
    let other = place.run(&["models", "tiny-llama"]).expect(0).out;
    std::fs::create_dir(place.path("tiny-gpt2")).unwrap();
    place.write("tiny-gpt2/config.json", other);
    let by_name = plan("tiny-llama", "d.json");
    let renamed = by_name.replacen("\"name\": \"tiny-llama\"", "\"name\": \"llama\"", 1);
    assert!(by_name != renamed && renamed == plan("tiny-gpt2", "c.json"));
    for (args, says) in [
        (
            &["models", "lama-3.1-8b"][..],
            "did you mean `llama-3.1-8b`?",
        ),
        (&["models", "config.json"], "is a file"),
        (
            &["compile", "models/gpt2", "--cluster", "dgx-h100"],
            "did you mean `gpt2`, which is built in?",
        ),
    ] {
        place.refuses(args, &[3]).says(&[says]);
    }
}
