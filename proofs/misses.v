(** A selector that reads one fixed linear sketch of the cache misses the heavy page.

    The heavy page needs exp, so this is over Coq's reals. MathComp's matrices cannot be had over them
    without one more axiom (a choice function), so the two facts of linear algebra that are needed stand
    here by elimination: m equations in more than m unknowns have a solution other than 0, and a query
    outside the row space meets a solution. [sketch.v] has the first over every field. *)
From Coq Require Import Reals Lra FunctionalExtensionality.
From mathcomp Require Import all_ssreflect.
From Locks Require Import real_sum lse attention.
Set Implicit Arguments.
Unset Strict Implicit.
Unset Printing Implicit Defensive.
Local Open Scope R_scope.

Section Elimination.

(** The queries that the rows of S combine to. *)
Definition in_row_space m D (S : 'I_m -> vec D) (q : vec D) : Prop :=
  exists c : vec m, forall j, q j = \sum_r c r * S r j.

Definition unseen m D (S : 'I_m -> vec D) (u : vec D) : Prop := forall r, dot (S r) u = 0.

Lemma dot_recl D (a b : vec D.+1) :
  dot a b = a ord0 * b ord0 + dot (fun j => a (lift ord0 j)) (fun j => b (lift ord0 j)).
Proof. by rewrite /dot big_ord_recl. Qed.

(** The coordinates are all zero, or one is not. *)
Lemma zero_or_pivot n (a : vec n) : (forall j, a j = 0) \/ exists j, a j <> 0.
Proof.
elim: n a => [|n IH] a; first by left; case.
have [a0|] := Req_dec (a ord0) 0; last by right; exists ord0.
have [all0|[j aj]] := IH (fun j => a (lift ord0 j)); last by right; exists (lift ord0 j).
by left=> j; case: (unliftP ord0 j) => [j' ->|-> //].
Qed.

Definition unit_vec n (j : 'I_n) : vec n := fun i => if i == j then 1 else 0.

Lemma dot_unit n (a : vec n) j : dot a (unit_vec j) = a j.
Proof.
rewrite /dot (bigD1 j) //= /unit_vec eqxx big1 => [|i /negbTE->]; lra.
Qed.

(** Gauss: either the first unknown is free, or a row with a pivot in it removes it from the others. *)
Lemma unseen_direction m D (S : 'I_m -> vec D) :
  (m < D)%N -> exists u, unseen S u /\ exists j, u j <> 0.
Proof.
elim: m D S => [|m IH] [//|D] S mD; first by exists (fun=> 1); split=> [[]//|]; exists ord0; lra.
have [no_pivot | [p pivot]] := zero_or_pivot (fun r => S r ord0).
  exists (unit_vec ord0); split=> [r|]; first by rewrite dot_unit.
  by exists ord0; rewrite /unit_vec eqxx; lra.
pose tail (a : vec D.+1) : vec D := fun j => a (lift ord0 j).
pose reduced r := sub_vec (tail (S (lift p r)))
                          (scale_vec (S (lift p r) ord0 / S p ord0) (tail (S p))).
have [u [unseen_u [j uj]]] := IH D reduced mD.
pose u0 := - dot (tail (S p)) u / S p ord0.
pose w (j : 'I_D.+1) := if unlift ord0 j is Some j' then u j' else u0.
have wE r : dot (S r) w = S r ord0 * u0 + dot (tail (S r)) u.
  rewrite dot_recl /w unlift_none; congr (_ + _).
  by apply: eq_bigr => i _; rewrite liftK.
exists w; split; last by exists (lift ord0 j); rewrite /w liftK.
move=> r; rewrite wE /u0; case: (unliftP p r) => [r' ->|->]; last by field.
have := unseen_u r'; rewrite /reduced dotC dot_subr dot_scaler ![dot u _]dotC => row0.
have -> : dot (tail (S (lift p r'))) u = S (lift p r') ord0 / S p ord0 * dot (tail (S p)) u by lra.
by field.
Qed.

(** An unseen direction is orthogonal to the whole row space. *)
Lemma row_space_unseen m D (S : 'I_m -> vec D) q u :
  in_row_space S q -> unseen S u -> dot q u = 0.
Proof.
case=> c qc uS; rewrite /dot (eq_bigr (fun j => \sum_r c r * (S r j * u j))).
  rewrite exchange_big big1 //= => r _; rewrite sum_scale -/(dot (S r) u) uS; lra.
by move=> j _; rewrite qc -sum_scale_r; apply: eq_bigr => r _; lra.
Qed.

(** Fredholm's alternative: a query is combined of the rows, or it meets an unseen direction. *)
Lemma row_space_or_unseen m D (S : 'I_m -> vec D) q :
  in_row_space S q \/ exists2 u, unseen S u & dot q u = 1.
Proof.
elim: m S q => [|m IH] S q.
  have [q0 | [j qj]] := zero_or_pivot q.
    by left; exists (fun=> 0) => j; rewrite big_ord0 q0.
  by right; exists (scale_vec (/ q j) (unit_vec j)) => [[]//|]; rewrite dot_scaler dot_unit; field.
pose first := S ord0; pose rest r := S (lift ord0 r).
have combine c0 (c : vec m) a :
    (forall j, a j = c0 * first j + \sum_r c r * rest r j) -> in_row_space S a.
  move=> ac; exists (fun r => if unlift ord0 r is Some r' then c r' else c0) => j.
  rewrite ac big_ord_recl unlift_none; congr (_ + _).
  by apply: eq_bigr => r _; rewrite liftK.
have unseen_both u : dot first u = 0 -> unseen rest u -> unseen S u.
  by move=> fu ru r; case: (unliftP ord0 r) => [r' ->|->]; [apply: ru | apply: fu].
have [first_in | [w rest_w first_w]] := IH rest first.
  have [[c qc] | [u rest_u qu]] := IH rest q.
    by left; apply: (combine 0 c) => j; rewrite qc; lra.
  by right; exists u => //; apply: unseen_both => //; apply: row_space_unseen rest_u.
have [[c qc] | [u rest_u qu]] := IH rest (sub_vec q (scale_vec (dot q w) first)).
  left; apply: (combine (dot q w) c) => j; rewrite -qc /sub_vec /scale_vec; lra.
right; exists (sub_vec u (scale_vec (dot first u) w)); last first.
  rewrite dot_subr dot_scaler; move: qu; rewrite dotC dot_subr dot_scaler ![dot u _]dotC; lra.
apply: unseen_both => [|r]; rewrite dot_subr dot_scaler ?first_w; first lra.
by rewrite rest_w rest_u; lra.
Qed.

(** Every sketch narrower than D leaves queries outside its row space: each unseen direction is one. *)
Lemma query_outside_row_space m D (S : 'I_m -> vec D) :
  (m < D)%N -> exists q, ~ in_row_space S q.
Proof.
move=> mD; have [u [uS [j uj]]] := unseen_direction S mD; exists u => u_in.
by have := row_space_unseen u_in uS; have := dot_gt0 uj; lra.
Qed.

End Elimination.

Section Misses.
Variables (m D N P : nat) (S : 'I_m -> vec D).

(** N pages of P keys; a token is a page and a place on it. *)
Definition token := prod_finType (ordinal_finType N) (ordinal_finType P).
Definition cache := token -> vec D.

(** All that a selector may read of the cache: S k for every key k. *)
Definition sketch (K : cache) : token -> vec m := fun i r => dot (S r) (K i).

(** The cache in which the keys of page n are moved by t u, all others as they are. *)
Definition move_page (K : cache) (n : 'I_N) (t : R) (u : vec D) : cache :=
  fun i => if i.1 == n then add_vec (K i) (scale_vec t u) else K i.

Definition page_tokens (n : 'I_N) : {set token} := tokens_of fst [set n].

Lemma page_tokens_neq0 n : (0 < P)%N -> page_tokens n != set0.
Proof. by move=> P0; apply/set0Pn; exists (n, Ordinal P0); rewrite !inE eqxx. Qed.

Lemma sketch_move K n t u : unseen S u -> sketch (move_page K n t u) = sketch K.
Proof.
move=> uS; apply: functional_extensionality => i; apply: functional_extensionality => r.
by rewrite /sketch /move_page; case: eqP => // _; rewrite dot_addr dot_scaler uS; lra.
Qed.

(** Moving page n by t u with scale q.u = 1 multiplies its mass by e^t and leaves the rest. *)
Lemma mass_moved_page scale q K n t u :
  scale * dot q u = 1 ->
  mass (page_tokens n) (logits scale q (move_page K n t u)) =
  exp t * mass (page_tokens n) (logits scale q K).
Proof.
move=> qu; rewrite /mass -sum_scale; apply: eq_bigr => i; rewrite !inE => in_n.
rewrite -exp_plus /logits /move_page in_n dot_addr dot_scaler; congr exp.
rewrite Rmult_plus_distr_l; have -> : scale * (t * dot q u) = t * (scale * dot q u) by lra.
by rewrite qu; lra.
Qed.

Lemma mass_other_pages scale q K n t u :
  mass (~: page_tokens n) (logits scale q (move_page K n t u)) =
  mass (~: page_tokens n) (logits scale q K).
Proof.
by apply: eq_bigr => i; rewrite !inE /logits /move_page => /negbTE->.
Qed.

(** From some t on, the moved page holds all but eps of the mass, whichever page it is. *)
Lemma moved_page_heavy scale q K u eps :
  (0 < P)%N -> scale * dot q u = 1 -> 0 < eps ->
  exists t0, forall t n, t0 <= t ->
    1 - eps < share (page_tokens n) (logits scale q (move_page K n t u)).
Proof.
move=> P0 qu eps0; set x := logits scale q K.
have m0 n : 0 < mass (page_tokens n) x by apply/mass_gt0/page_tokens_neq0.
pose need n := mass (~: page_tokens n) x / (eps * mass (page_tokens n) x).
have need0 n : 0 <= need n.
  by apply: Rmult_le_pos; [apply: mass_ge0 | apply/Rlt_le/Rinv_0_lt_compat; have := m0 n; nra].
have total0 : 0 <= \sum_n need n by apply: sum_ge0.
exists (ln (1 + \sum_n need n)) => t n t0; have mn := m0 n.
have big_t : need n < exp t.
  have et : 1 + \sum_n need n <= exp t.
    rewrite -(exp_ln (1 + _)); last lra.
    by case: t0 => [/exp_increasing/Rlt_le | ->]; [| lra].
  by have := @sum_ge_term _ xpredT need n isT (fun j _ => need0 j); lra.
have rest : mass (~: page_tokens n) x < eps * (exp t * mass (page_tokens n) x).
  have -> : mass (~: page_tokens n) x = need n * (eps * mass (page_tokens n) x).
    by rewrite /need; field; lra.
  by have := Rmult_lt_compat_r (eps * mass (page_tokens n) x) _ _ _ big_t; nra.
rewrite /share (mass_setC (page_tokens n)) mass_moved_page // mass_other_pages -/x.
have et := exp_pos t; have mr := mass_ge0 (~: page_tokens n) x.
set a := exp t * _ in rest *; set b := mass _ _ in rest mr *.
have a0 : 0 < a by apply: Rmult_lt_0_compat.
apply: (Rmult_lt_reg_r (a + b)); first lra.
have -> : a / (a + b) * (a + b) = a by field; lra.
by nra.
Qed.

(** A sketch that is fixed before the pages are seen.

    Some query lies outside its row space. For each such query there is a direction u that S does not see
    and q does, so that for every cache and every eps the following holds from some t on. Take the N caches
    whose n-th has page n moved by t u. They have one and the same sketch; page n holds more than 1 - eps
    of the n-th cache's mass; and every selector that reads the sketch and the query only and keeps at
    most M pages keeps the same pages in all of them, and misses the heavy page in at least N - M. *)
Theorem fixed_sketch_misses :
  (m < D)%N -> (0 < P)%N ->
  (exists q, ~ in_row_space S q) /\
  forall q scale, ~ in_row_space S q -> scale <> 0 ->
  exists u, unseen S u /\ dot q u <> 0 /\
  forall (K : cache) eps, 0 < eps ->
  exists t0, forall t, t0 <= t ->
  let moved n := move_page K n t u in
  [/\ forall n i, i.1 != n -> moved n i = K i,
      forall n, sketch (moved n) = sketch K,
      forall n, 1 - eps < share (page_tokens n) (logits scale q (moved n))
    & forall (select : (token -> vec m) -> vec D -> {set 'I_N}) (M : nat),
        (#|select (sketch K) q| <= M)%N ->
        (forall n, select (sketch (moved n)) q = select (sketch K) q) /\
        (N - M <= #|[set n | n \notin select (sketch (moved n)) q]|)%N].
Proof.
move=> mD P0; split; first exact: query_outside_row_space.
move=> q scale q_out scale0.
have [// | [w wS qw]] := row_space_or_unseen S q.
pose u := scale_vec (/ scale) w; have qu : scale * dot q u = 1 by rewrite dot_scaler qw; field.
have uS : unseen S u by move=> r; rewrite dot_scaler wS; lra.
exists u; split=> //; split; first by move=> qu0; move: qu; rewrite qu0; lra.
move=> K eps eps0; have [t0 heavy] := moved_page_heavy K P0 qu eps0.
exists t0 => t t_big moved; have same n : sketch (moved n) = sketch K by apply: sketch_move.
split=> // [n i /negbTE in_n | n | select M card_le].
- by rewrite /moved /move_page in_n.
- exact: heavy.
split=> [n|]; first by rewrite same.
have -> : [set n | n \notin select (sketch (moved n)) q] = ~: select (sketch K) q.
  by apply/setP => n; rewrite !inE same.
by rewrite cardsCs setCK card_ord leq_sub2l.
Qed.

(** The premise on q is needed: a query in the row space is seen in full, its logits can be computed
    from the sketch. *)
Lemma row_space_query_seen q :
  in_row_space S q -> exists f : vec m -> R, forall (K : cache) i, dot q (K i) = f (sketch K i).
Proof.
case=> c qc; exists (fun s => dot c s) => K i; rewrite /dot /sketch.
rewrite (eq_bigr (fun j => \sum_r c r * (S r j * K i j))).
  by rewrite exchange_big /=; apply: eq_bigr => r _; rewrite sum_scale.
by move=> j _; rewrite qc -sum_scale_r; apply: eq_bigr => r _; lra.
Qed.

End Misses.
